/* Makes a library of ops importable. Importing it runs its static initialisers, which register the ops. */
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include "../core/cpu.h"

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
#define STRING_(a) #a
#define STRING(a) STRING_(a)

/* plan(text) -> the vector path that it leads to: takes the text of MACKO_PLAN, ValueError where that says nothing. */
static PyObject *plan(PyObject *self, PyObject *text) {
    static const char *const cpu_paths[] = {"scalar", "avx2", "avx512"};
    (void)self;
    const char *said = PyUnicode_AsUTF8AndSize(text, NULL), *error = said ? macko_knobs_set(said) : NULL;
    if (error) PyErr_SetString(PyExc_ValueError, error);
    return said && !error ? PyUnicode_FromString(cpu_paths[macko_best_cpu_path()]) : NULL;
}

static PyMethodDef methods[] = {{"plan", plan, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, STRING(MACKO_MODULE), NULL, -1, methods, NULL, NULL, NULL, NULL};

/* The build says in MACKO_CUDA_ARCHES what _C_cuda was compiled for, separated by spaces; empty: there is no _C_cuda. */
PyMODINIT_FUNC CONCAT(PyInit_, MACKO_MODULE)(void) {
    PyObject *created = PyModule_Create(&module);
    if (!created || PyModule_AddStringConstant(created, "cuda_arches", MACKO_CUDA_ARCHES)) return NULL;
    return created;
}

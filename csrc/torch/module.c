/* Makes a library of ops importable. Importing it runs its static initialisers, which register the ops. */
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include "../core/cpu.h"
#include "../core/knobs.h"
#include "../slab/ring_plan.h"
#include "layouts.h"

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

/* slab_kernels(major) -> (what multiplies slabs on a GPU of such a compute capability, up to how many tokens). */
static PyObject *slab_kernels(PyObject *self, PyObject *number) {
    (void)self;
    const int major = (int)PyLong_AsLong(number), *limit = macko_knob(MACKO_KNOB_TILE_TOKENS);
    if (PyErr_Occurred()) return NULL;
    const bool wgmma = macko_has_wgmma(major);
    const int64_t most = wgmma ? INT32_MAX : macko_ring_tokens_of(major);
    const char *const kernels = wgmma ? "wgmma" : most ? "mma.sync" : "none";
    return Py_BuildValue("(sL)", kernels, (long long)(most && limit ? *limit : most));
}

static PyMethodDef methods[] = {
    {"plan", plan, METH_O, NULL}, {"slab_kernels", slab_kernels, METH_O, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, STRING(MACKO_MODULE), NULL, -1, methods, NULL, NULL, NULL, NULL};

/* {name: number} of the layouts; NULL and an error where a number is not one layout's alone. */
static PyObject *layouts(void) {
    if (macko_layout_twice())
        return PyErr_Format(PyExc_ImportError, "the number of the layout %s is another one's, or none",
                            macko_layout_twice());
    PyObject *numbers = PyDict_New();
    for (int number = 0; numbers && number < MACKO_MOST_LAYOUTS; number++) {
        PyObject *value = macko_layout_name(number) ? PyLong_FromLong(number) : NULL;
        if (value && PyDict_SetItemString(numbers, macko_layout_name(number), value)) Py_CLEAR(numbers);
        Py_XDECREF(value);
    }
    return PyErr_Occurred() ? NULL : numbers;
}

/* The build says in MACKO_CUDA_ARCHES what _C_cuda was compiled for, separated by spaces; empty: there is no _C_cuda. */
PyMODINIT_FUNC CONCAT(PyInit_, MACKO_MODULE)(void) {
    PyObject *created = PyModule_Create(&module), *numbers = created ? layouts() : NULL;
    if (!numbers || PyModule_AddObjectRef(created, "layouts", numbers) ||
        PyModule_AddStringConstant(created, "cuda_arches", MACKO_CUDA_ARCHES))
        return NULL;
    Py_DECREF(numbers);
    return created;
}

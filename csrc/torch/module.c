/* Makes a library of ops importable. Importing it runs its static initialisers, which register the ops. */
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#include "../core/cpu.h"

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
#define STRING_(a) #a
#define STRING(a) STRING_(a)

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, STRING(MACKO_MODULE), NULL, -1, NULL, NULL, NULL, NULL, NULL};

/* The build says in MACKO_CUDA_ARCHES what _C_cuda was compiled for, separated by spaces; empty: there is no _C_cuda. */
PyMODINIT_FUNC CONCAT(PyInit_, MACKO_MODULE)(void) {
    static const char *const cpu_paths[] = {"scalar", "avx2", "avx512"};
    PyObject *created = PyModule_Create(&module);
    if (!created || PyModule_AddStringConstant(created, "cuda_arches", MACKO_CUDA_ARCHES) ||
        PyModule_AddStringConstant(created, "cpu_path", cpu_paths[macko_best_cpu_path()]))
        return NULL;
    return created;
}

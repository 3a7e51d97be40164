/* Makes a library of ops importable. Importing it runs its static initialisers, which register the ops. */
#define Py_LIMITED_API 0x030a0000
#include <Python.h>

#define CONCAT_(a, b) a##b
#define CONCAT(a, b) CONCAT_(a, b)
#define STRING_(a) #a
#define STRING(a) STRING_(a)

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, STRING(MACKO_MODULE), NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC CONCAT(PyInit_, MACKO_MODULE)(void) {
    return PyModule_Create(&module);
}

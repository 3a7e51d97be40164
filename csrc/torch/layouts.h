/* What the module says of the layouts that the library has: each file of one adds it when the library is loaded. */
#pragma once

#include "../core/types.h"

MACKO_C_BEGIN

enum { MACKO_MOST_LAYOUTS = 64 };

/* NULL: no layout has this number, which is below MACKO_MOST_LAYOUTS. */
const char *macko_layout_name(int number);
/* The name of a layout whose number another one has, or that is none; NULL: there is no such layout. */
const char *macko_layout_twice(void);

MACKO_C_END

// The one main of every test program; compiled once, since it costs more than most test files.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#define SEQMIX_UNIT plain_unit
#include "unit.inl"

#define SEQMIX_UNIT newer_unit
#include "unit.inl"

#pragma once

/// The version of the library; CMake reads it from here.
#define SEQMIX_VERSION_MAJOR 0
#define SEQMIX_VERSION_MINOR 1
#define SEQMIX_VERSION_PATCH 0

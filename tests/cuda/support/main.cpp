#include "support/device_test.hpp"

int main() { return seqmix::testing::run_device_tests(); }

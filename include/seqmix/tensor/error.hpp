#pragma once

#include <stdexcept>
#include <string>

namespace seqmix::inline v0 {

/// The base of every exception of the library; `what()` is one sentence for a person.
struct error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// A view, state or buffer has the wrong extents: names the argument, the expected and the actual size.
struct shape_error : error {
  using error::error;
};

/// A number is outside its range (a window of 0, a positive log-decay, a NaN loss).
struct value_error : error {
  using error::error;
};

/// A file cannot be read or written, or is not what its name promises.
struct file_error : error {
  using error::error;
};

/// A device refuses a launch or has failed before.
struct device_error : error {
  using error::error;
};

/// An option of a program or an architecture is unknown or contradicts another one.
struct option_error : error {
  using error::error;
};

}  // namespace seqmix::inline v0

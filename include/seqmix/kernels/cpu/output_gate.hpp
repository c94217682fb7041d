#pragma once

#include <seqmix/kernels/cpu/activations.hpp>
#include <seqmix/kernels/reference/output_gate.hpp>

namespace seqmix::inline v0::kernels {

/// y [R,C] = o f(z); y may be o.
template <class Isa, class Threads, class T>
void output_gate_forward(device::basic_cpu<Isa, Threads> dev, activation f, view2<T const> o_rc,
                         view2<same<T> const> z_rc, view2<same<T>> y_rc) {
  expect_shape("output_gate: z", z_rc, o_rc.extent);
  expect_shape("output_gate: y", y_rc, o_rc.extent);
  expect_contiguous("output_gate: o", o_rc);
  expect_contiguous("output_gate: z", z_rc);
  expect_contiguous("output_gate: y", y_rc);
  detail::with_activation(f, [&](auto kind) {
    detail::for_row_blocks(dev, o_rc.extent[0], [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        simd::map<Isa>(
            o_rc.extent[1],
            [](auto const& o, auto const& z) {
              return o * detail::activation_at<decltype(kind)::value, Isa, T>(z).value;
            },
            y_rc.at(r), o_rc.at(r), z_rc.at(r));
    });
  });
}

/// do and dz are written; y is the forward's result once more, for the weights that read it (empty: not wanted).
/// do may be dy or o, dz may be z.
template <class Isa, class Threads, class T>
void output_gate_backward(device::basic_cpu<Isa, Threads> dev, activation f, view2<T const> o_rc,
                          view2<same<T> const> z_rc, view2<same<T> const> dy_rc, view2<same<T>> do_rc,
                          view2<same<T>> dz_rc, view2<same<T>> y_rc = {}) {
  for (auto const& v : {z_rc, dy_rc, view2<T const>(do_rc), view2<T const>(dz_rc)}) {
    expect_shape("output_gate: z and gradients", v, o_rc.extent);
    expect_contiguous("output_gate: z and gradients", v);
  }
  expect_contiguous("output_gate: o", o_rc);
  if (y_rc) {
    expect_shape("output_gate: y", y_rc, o_rc.extent);
    expect_contiguous("output_gate: y", y_rc);
  }
  detail::with_activation(f, [&](auto kind) {
    detail::for_row_blocks(dev, o_rc.extent[0], [&](index_t, index_t begin, index_t end) {
      for (index_t r = begin; r < end; ++r)
        simd::for_vectors<Isa, T>(o_rc.extent[1], [&](index_t c, auto const& lanes) {
          auto const o = lanes.load(o_rc.at(r, c)), dy = lanes.load(dy_rc.at(r, c));
          auto const gate = detail::activation_at<decltype(kind)::value, Isa, T>(lanes.load(z_rc.at(r, c)));
          lanes.store(do_rc.at(r, c), dy * gate.value);
          lanes.store(dz_rc.at(r, c), dy * o * gate.slope);
          if (y_rc) lanes.store(y_rc.at(r, c), o * gate.value);
        });
    });
  });
}

}  // namespace seqmix::inline v0::kernels

#pragma once

#include <seqmix/kernels/reference/activations.hpp>

namespace seqmix::inline v0::kernels {

/// y [R,C] = o f(z): a gate of its own on a mixer's output, without a norm (`output_stage` fuses RMS norm and
/// silu). y may be o. Source: RWKV-7 and Griffin; Dauphin et al. (arXiv 1612.08083), equation 1.
template <class T>
void output_gate_forward(device::reference, activation f, view2<T const> o_rc, view2<same<T> const> z_rc,
                         view2<same<T>> y_rc) {
  expect_shape("output_gate: z", z_rc, o_rc.extent);
  expect_shape("output_gate: y", y_rc, o_rc.extent);
  for (index_t r = 0; r < o_rc.extent[0]; ++r)
    for (index_t c = 0; c < o_rc.extent[1]; ++c) y_rc(r, c) = o_rc(r, c) * activated(f, z_rc(r, c));
}

}  // namespace seqmix::inline v0::kernels

#pragma once

#include <vector>

#include <seqmix/kernels/selective_scan.hpp>
#include <seqmix/tensor/device.hpp>

namespace seqmix::inline v0::kernels {

/// The definition of kernels/selective_scan.hpp, token by token, for any scalar. `final` [N,D,K] may be empty.
template <class T>
void selective_scan_forward(device::reference, selective_scan_shape const& s, selective_scan_input<T> const& in,
                            view2<same<T>> y_rd, view3<same<T>> final_ndk) {
  validate(s, in);
  expect_shape("selective scan y", y_rd, {s.seq.rows(), s.channels});
  index_t const K = s.states;
  std::vector<T> S(std::size_t(K), T(0));
  for (index_t n = 0; n < s.seq.count(); ++n)
    for (index_t d = 0; d < s.channels; ++d) {
      index_t const group = d * s.groups / s.channels;
      for (index_t k = 0; k < K; ++k) S[std::size_t(k)] = in.initial_ndk ? in.initial_ndk(n, d, k) : T(0);
      for (index_t r = s.seq.begin(n); r < s.seq.end(n); ++r) {
        T const delta = softplus(in.delta_rd(r, d) + (in.delta_bias_d ? in.delta_bias_d(d) : T(0)));
        T y = in.skip_d ? in.skip_d(d) * in.u_rd(r, d) : T(0);
        for (index_t k = 0; k < K; ++k) {
          T& state = S[std::size_t(k)];
          state = exp(bounded_log_decay(-delta * exp(in.a_log_dk(d, k)))) * state +
                  delta * in.b_rgk(r, group, k) * in.u_rd(r, d);
          y += in.c_rgk(r, group, k) * state;
        }
        y_rd(r, d) = in.z_rd ? y * silu(in.z_rd(r, d)) : y;
      }
      for (index_t k = 0; k < K && final_ndk; ++k) final_ndk(n, d, k) = S[std::size_t(k)];
    }
}

}  // namespace seqmix::inline v0::kernels

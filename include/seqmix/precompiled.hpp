#pragma once

#include <seqmix/models/language_model.hpp>

/// For programs of many translation units: the kernels that do not depend on an architecture, in float on this
/// build's processor (`device::cpu`), are declared here as compiled elsewhere: the matrix products, norms,
/// convolution, rows, and the recurrence over channels. A unit that includes this header compiles
/// faster and must be linked with the library that `seqmix_add_precompiled` of the CMake package makes; that one is
/// compiled from this same list (`sed 's/extern template/template/; /#pragma once/d' precompiled.hpp` without
/// CMake). Library and units need the same -march and -fopenmp: with others the linker misses symbols, it never
/// mixes them. Without this header nothing changes: everything is compiled where it is used.
namespace seqmix::inline v0 {

namespace kernels {

// products
extern template void linear_forward(device::cpu, view2<float const>, view2<float const>, view2<float>, bool,
                                    arena&);
extern template void linear_backward_input(device::cpu, view2<float const>, view2<float const>, view2<float>, bool,
                                           arena&);
extern template void linear_backward_weight(device::cpu, view2<float const>, view2<float const>, view2<float>,
                                            arena&);
extern template void block_diagonal_forward(device::cpu, view2<float const>, view3<float const>, view2<float>, bool,
                                            arena&);
extern template void block_diagonal_backward_input(device::cpu, view2<float const>, view3<float const>,
                                                   view2<float>, bool, arena&);
extern template void block_diagonal_backward_weight(device::cpu, view2<float const>, view2<float const>,
                                                    view3<float>, arena&);
extern template void tile_product<device::cpu::isa>(index_t, index_t, index_t, tile_operand<float>, float const*,
                                                    index_t, float*, index_t, bool);

// rows
extern template void rms_norm_forward(device::cpu, view2<float const>, float const*, double, view2<float>, float*);
extern template void rms_norm_backward(device::cpu, view2<float const>, float const*, float const*,
                                       view2<float const>, view2<float>, bool, float*, arena&);
extern template void layer_norm_forward(device::cpu, view2<float const>, float const*, float const*, double,
                                        view2<float>, float*, float*);
extern template void layer_norm_backward(device::cpu, view2<float const>, float const*, float const*, float const*,
                                         view2<float const>, view2<float>, bool, float*, float*, arena&);
extern template void output_stage_forward(device::cpu, output_stage const&, view2<float const>, view2<float const>,
                                          float const*, view2<float>, float*);
extern template void output_stage_backward(device::cpu, output_stage const&, view2<float const>, view2<float const>,
                                           float const*, float const*, view2<float const>, view2<float>,
                                           view2<float>, float*, arena&, view2<float>);
extern template void swiglu_forward(device::cpu, view2<float const>, view2<float const>, view2<float>);
extern template void swiglu_backward(device::cpu, view2<float const>, view2<float const>, view2<float const>,
                                     view2<float>, view2<float>, view2<float>);
extern template void rope(device::cpu, sequences const&, index_t const*, rope_options const&, double, view3<float>,
                          arena&);
extern template void skip_forward(device::cpu, view3<float const>, float const*, view3<float>);
extern template void skip_backward(device::cpu, view3<float const>, float const*, view3<float const>, view3<float>,
                                   float*, arena&);
extern template void embedding_forward(device::cpu, std::int32_t const*, view2<float const>, view2<float>);
extern template void embedding_backward(device::cpu, std::int32_t const*, view2<float const>, view2<float>);
extern template index_t cross_entropy(device::cpu, view2<float const>, std::int32_t const*, double, view2<float>,
                                      double*, arena&);
extern template void activate(device::cpu, activation, view2<float const>, view2<float>);
extern template void activate_backward(device::cpu, activation, view2<float const>, view2<float const>,
                                       view2<float>, bool);
extern template void output_gate_forward(device::cpu, activation, view2<float const>, view2<float const>,
                                         view2<float>);
extern template void output_gate_backward(device::cpu, activation, view2<float const>, view2<float const>,
                                          view2<float const>, view2<float>, view2<float>, view2<float>);
extern template void head_norm_forward(device::cpu, head_norm const&, view3<float const>, float const*,
                                       float const*, view3<float>, float*);
extern template void head_norm_backward(device::cpu, head_norm const&, view3<float const>, float const*,
                                        float const*, view3<float const>, view3<float>, bool, float*, float*,
                                        arena&);
extern template void feature_map_forward(device::cpu, feature_map, index_t, view3<float const>, view3<float>,
                                         arena&);
extern template void feature_map_backward(device::cpu, feature_map, index_t, view3<float const>, view3<float const>,
                                          view3<float const>, view3<float>, arena&);
extern template void own_token_forward(device::cpu, own_token<float> const&, view3<float>);
extern template void own_token_backward(device::cpu, own_token<float> const&, view3<float const>,
                                        own_token_gradient<float> const&, arena&);

// along time
extern template void conv_forward(device::cpu, sequences const&, view2<float const>, view2<float const>,
                                  float const*, bool, view3<float const>, view2<float>, view3<float>, arena&);
extern template void conv_backward(device::cpu, sequences const&, view2<float const>, view2<float const>,
                                   float const*, bool, view3<float const>, view2<float const>, view3<float const>,
                                   view2<float>, view2<float>, float*, view3<float>, arena&);
extern template void token_shift_forward(device::cpu, sequences const&, view2<float const>, view2<float const>,
                                         view3<float const>, view2<float const>, view3<float>, view2<float>);
extern template void token_shift_backward(device::cpu, sequences const&, view2<float const>, view2<float const>,
                                          view3<float const>, view2<float const>, view3<float const>,
                                          view2<float const>, view2<float>, view2<float>, view3<float>,
                                          view2<float>, bool, arena&);

namespace detail {
extern template void channels_forward(device::cpu, recurrence_shape const&, recurrence_input<float> const&,
                                      view3<float>, recurrence_saved<float> const*, view4<float>, arena&);
extern template void channels_backward(device::cpu, recurrence_shape const&, recurrence_input<float> const&,
                                       recurrence_saved<float> const&, view3<float const>, view4<float const>,
                                       recurrence_gradient<float> const&, arena&);
}  // namespace detail

}  // namespace kernels

}  // namespace seqmix::inline v0

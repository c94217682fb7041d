#pragma once

#include <seqmix/gates/constant.hpp>
#include <seqmix/gates/gla.hpp>
#include <seqmix/gates/mamba2.hpp>
#include <seqmix/gates/none.hpp>
#include <seqmix/models/cross.hpp>

/// The grid of the program: three memories, four ways to forget, five ways to read. 24 of the 60 cells make sense.
namespace ablation {

using grid = seqmix::cross<
    seqmix::type_list<seqmix::states::history, seqmix::states::outer_product, seqmix::states::delta_rule>,
    seqmix::type_list<seqmix::gates::none, seqmix::gates::constant, seqmix::gates::mamba2, seqmix::gates::gla>,
    seqmix::type_list<seqmix::selectors::softmax, seqmix::selectors::window, seqmix::selectors::top1_element<>,
                      seqmix::selectors::top1_chunk<>, seqmix::selectors::linear>>;

}  // namespace ablation

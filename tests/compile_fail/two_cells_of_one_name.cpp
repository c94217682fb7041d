// EXPECT: seqmix cross: two policies of one list have the same name, so two cells would have one
// EXPECT: gates::log_sigmoid
#include <seqmix/gates/log_sigmoid.hpp>
#include <seqmix/models/cross.hpp>

using namespace seqmix;

struct slow_forget : gates::log_sigmoid {
#ifdef SEQMIX_TWIN
  static constexpr std::string_view name = "slow_forget";
#endif
};
using grid = cross<type_list<states::outer_product>, type_list<gates::log_sigmoid, slow_forget>,
                   type_list<selectors::linear>>;
static_assert(grid::size == 2);

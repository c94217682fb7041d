// The body of both units. SEQMIX_UNIT is the name of the function.
#include <cstddef>
#include <typeinfo>

#include <all_headers.hpp>

#include "facts.hpp"

facts SEQMIX_UNIT() {
  using namespace seqmix;
  buffer<std::byte> block(1024);
  arena pieces(block);
  auto const x_rc = pieces.take_view<float, 2>({4, 8});
  parallel_for(device::cpu{2}, 4, [&](index_t r, int) { x_rc(r, 0) = float(random_stream(1, "unit").uniform(0)); });
  return {{sizeof(view1<float>), sizeof(view4<double>), offsetof(view2<float>, extent), offsetof(view2<float>, stride),
           sizeof(buffer<float>), sizeof(arena), sizeof(sequences), sizeof(device::cpu), alignment},
          typeid(device::cpu).name()};
}

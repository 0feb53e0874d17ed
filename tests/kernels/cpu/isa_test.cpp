#include "kernels/cpu/isa.h"

#include <gmock/gmock.h>

#include "kernels/error.h"
#include "kernels/newton_schulz.h"
#include "tests/kernels/cpu/every_isa.h"

namespace dmuon::cpu {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

TEST(Isa, PortableIsAvailableEverywhereAndTheActiveOneIsAvailable) {
  EXPECT_EQ(available_isas().front(), Isa::portable);
  EXPECT_THAT(available_isas(), Contains(active_isa()));
}

TEST(Isa, RefusesWhatTheProcessorDoesNotHave) {
  for (Isa isa : {Isa::avx2, Isa::avx512, Isa::avx512_bf16}) {
    const auto available = available_isas();
    if (std::count(available.begin(), available.end(), isa) != 0) continue;
    EXPECT_THAT([&] { force_isa(isa); },
                ThrowsMessage<ConfigError>(AllOf(HasSubstr(isa_name(isa)), HasSubstr("highest"))));
  }
}

class Dispatch : public EveryIsa {};

TEST_P(Dispatch, RunsTheLevelThatIsForcedAndSaysSo) {
  EXPECT_EQ(active_isa(), GetParam());
  const std::string name = isa_name(GetParam());
  EXPECT_EQ(newton_schulz_kernel(1, 256, 1024, {}), "gram/" + name + "/float32");
  EXPECT_EQ(newton_schulz_kernel(8, 1024, 256, {}), "gram/" + name + "/float32");
  EXPECT_EQ(newton_schulz_kernel(1, 256, 256, {}), "direct/" + name + "/float32");
  EXPECT_EQ(newton_schulz_kernel(0, 256, 256, {}), "none");
}

TEST_P(Dispatch, KnowsNoBfloat16WithoutItsInstructions) {
  const NewtonSchulz options{.algorithm = NsAlgorithm::direct, .dtype = NsDtype::bfloat16};
  const bool pairs = GetParam() == Isa::avx512_bf16;
  EXPECT_EQ(newton_schulz_kernel(1, 64, 512, options),
            message("direct/", isa_name(GetParam()), pairs ? "/bfloat16" : "/float32"));
}

INSTANTIATE_TEST_SUITE_P(Levels, Dispatch, ::testing::ValuesIn(available_isas()), name_of);

}  // namespace
}  // namespace dmuon::cpu

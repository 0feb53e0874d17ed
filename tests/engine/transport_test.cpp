#include "engine/transport.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <gmock/gmock.h>

#include <mutex>
#include <numeric>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "engine/error.h"
#include "engine/flight_ring.h"
#include "engine/traffic.h"
#include "tests/support/sim_transport.h"
#include "tests/support/thread_group.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

using Body = std::function<void(Transport&)>;
enum class Backend { c10d, sim };

std::vector<float> values(const at::Tensor& tensor) {
  const at::Tensor flat = tensor.to(at::kFloat).contiguous();
  return {flat.data_ptr<float>(), flat.data_ptr<float>() + flat.numel()};
}

// What every transport promises.
class AnyTransport : public ::testing::TestWithParam<Backend> {
 protected:
  static void run(int size, const Body& body, FlightRing* ring = nullptr) {
    if (GetParam() == Backend::c10d) {
      testing::run_ranks(size, [&](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
        body(*make_c10d_transport(group, ring));
      });
    } else {
      testing::SimWorld world(size);
      const std::function<void(int)> rank_body = [&](int rank) {
        body(*world.transport(rank, "main", ring));
      };
      testing::run_ranks(size, rank_body);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(Over, AnyTransport, ::testing::Values(Backend::c10d, Backend::sim),
                         [](const auto& backend) {
                           return backend.param == Backend::c10d ? "c10d" : "sim";
                         });

TEST_P(AnyTransport, BroadcastsEveryPartFromItsRoot) {
  run(3, [](Transport& transport) {
    const at::Tensor a = at::full({2}, transport.rank()), b = at::full({}, transport.rank() + 10.0);
    transport.broadcast({{a, 2}, {b, 0}}, "u");
    EXPECT_THAT(values(a), ElementsAre(2, 2));
    EXPECT_THAT(values(b), ElementsAre(10));
  });
}

// Rank r sends r + d elements of value 10 r + d to rank d, and keeps its own.
void check_exchange(Transport& transport, at::ScalarType type) {
  const int rank = transport.rank(), size = transport.size();
  std::vector<int64_t> sends(size), receives(size);
  std::vector<float> to_send, wanted;
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    sends[other] = other == 0 ? 0 : rank + other;
    receives[other] = rank == 0 ? 0 : rank + other;
    to_send.insert(to_send.end(), sends[other], 10 * rank + other);
    wanted.insert(wanted.end(), receives[other], 10 * other + rank);
  }
  at::Tensor send = at::empty({static_cast<int64_t>(to_send.size())}, at::kFloat);
  std::ranges::copy(to_send, send.data_ptr<float>());
  const at::Tensor recv = at::zeros({static_cast<int64_t>(wanted.size())}, type);
  transport.exchange(recv, receives, send.to(type), sends, "u");
  EXPECT_EQ(values(recv), wanted);
}

TEST_P(AnyTransport, ExchangesUnevenAndEmptyPartsOfAnyType) {
  run(4, [](Transport& transport) {
    check_exchange(transport, at::kFloat);
    check_exchange(transport, at::kBFloat16);
    check_exchange(transport, at::kDouble);
  });
}

TEST_P(AnyTransport, ReducesToEveryRank) {
  run(3, [](Transport& transport) {
    const at::Tensor sum = at::full({2}, transport.rank() + 1.0);
    const at::Tensor max = at::full({2}, transport.rank() + 1.0);
    transport.all_reduce(sum, ReduceOp::sum, "u");
    transport.all_reduce(max, ReduceOp::max, "u");
    EXPECT_THAT(values(sum), Each(6));
    EXPECT_THAT(values(max), Each(3));
  });
}

TEST_P(AnyTransport, GathersInRankOrder) {
  run(3, [](Transport& transport) {
    const at::Tensor out = at::zeros({3, 2});
    transport.all_gather(out, at::full({2}, 1.0 * transport.rank()), "u");
    EXPECT_THAT(values(out), ElementsAre(0, 0, 1, 1, 2, 2));
  });
}

TEST_P(AnyTransport, AloneNothingIsCommunicated) {
  FlightRing ring;
  run(
      1,
      [](Transport& transport) {
        const at::Tensor one = at::full({2}, 5.0), out = at::zeros({1, 2});
        transport.broadcast({{one, 0}}, "u");
        transport.all_reduce(one, ReduceOp::sum, "u");
        transport.exchange(at::empty({0}), {0}, at::empty({0}), {0}, "u");
        transport.all_gather(out, one, "u");
        EXPECT_THAT(values(out), ElementsAre(5, 5));
      },
      &ring);
  EXPECT_EQ(ring.total_operations(), 0);
}

TEST_P(AnyTransport, ChargesTheTrafficOfTheWholeGroup) {
  FlightRing ring;  // of all ranks
  run(
      4,
      [](Transport& transport) {
        const at::Tensor tensor = at::zeros({5});  // 20 bytes: 2 * 3 / 4 of it is 30 on each rank
        transport.broadcast({{tensor, 1}, {tensor, 2}}, "broadcast");
        check_exchange(transport, at::kFloat);
        transport.all_reduce(tensor, ReduceOp::sum, "reduce");
        transport.all_gather(at::zeros({4, 5}), tensor, "gather");
      },
      &ring);
  EXPECT_EQ(ring.total_sent_bytes("broadcast"), 2 * 3 * 20);
  EXPECT_EQ(ring.total_sent_bytes("u"), 4 * (6 + 7 + 8 + 9));
  EXPECT_EQ(ring.total_sent_bytes("reduce"), 2 * 3 * 20);
  EXPECT_EQ(ring.total_sent_bytes("gather"), 4 * 3 * 20);
  EXPECT_THAT(ring.records(), Each(Field(&FlightRecord::state, OpState::done)));
}

TEST_P(AnyTransport, RefusesWhatABackendWouldReadWrongly) {
  run(1, [](Transport& transport) {
    const at::Tensor column = at::zeros({4, 4}).select(1, 0);
    EXPECT_THAT(
        [&] {
          transport.broadcast({{column, 0}}, "w");
        },
        ThrowsMessage<ConfigError>(HasSubstr("'w': a tensor of shape [4], strides [4]")));
    EXPECT_THAT(
        [&] {
          transport.broadcast({{at::Tensor(), 0}}, "w");
        },
        ThrowsMessage<ConfigError>(HasSubstr("undefined")));
    EXPECT_THAT(
        [&] {
          transport.broadcast({{at::zeros({1}), 1}}, "w");
        },
        ThrowsMessage<ConfigError>(HasSubstr("root is 1")));
    EXPECT_THAT([&] { transport.exchange(at::zeros({2}), {2}, at::zeros({2}), {2}, "w"); },
                ThrowsMessage<ConfigError>(HasSubstr("recv_counts[0] is 2")));
    EXPECT_THAT([&] { transport.exchange(at::zeros({1}), {0}, at::zeros({0}), {0}, "w"); },
                ThrowsMessage<ConfigError>(HasSubstr("recv has 1 elements")));
    EXPECT_THAT(
        [&] {
          transport.all_gather(at::zeros({1, 0}), at::zeros({0}), "w");
        },
        ThrowsMessage<ConfigError>(HasSubstr("in needs at least 1")));
  });
}

TEST_P(AnyTransport, AnAbortedTransportStaysClosed) {
  run(2, [](Transport& transport) {
    transport.abort("loss is not finite");
    EXPECT_THAT([&] { transport.all_reduce(at::zeros({1}), ReduceOp::sum, "u"); },
                ThrowsMessage<RuntimeFailure>(HasSubstr("aborted: loss is not finite")));
  });
}

TEST_P(AnyTransport, AbortFreesTheRanksThatWait) {
  run(2, [](Transport& transport) {
    if (transport.rank() == 1) return transport.abort("loss is not finite");
    EXPECT_THROW(transport.all_reduce(at::zeros({1}), ReduceOp::sum, "u"), RuntimeFailure);
  });
}

TEST(C10dTransport, AFailureNamesTheOperationAndClosesTheTransport) {
  FlightRing ring;
  const auto body = [&](const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
    const auto transport = make_c10d_transport(group, group->getRank() == 0 ? &ring : nullptr);
    if (group->getRank() == 1) group->abort();
    const auto call = [&] { transport->broadcast({{at::zeros({4}), 1}}, "blocks.3"); };
    const std::string text = "broadcast 'blocks.3' of 16 bytes from rank 1 failed on rank ";
    EXPECT_THAT(call, ThrowsMessage<RuntimeFailure>(
                          AllOf(HasSubstr(text), HasSubstr("the group was aborted"))));
    EXPECT_THAT(call, ThrowsMessage<RuntimeFailure>(
                          AllOf(HasSubstr("this group is closed since"), HasSubstr(text))));
  };
  testing::run_ranks(2, body);
  ASSERT_EQ(ring.records().size(), 1);
  EXPECT_EQ(ring.records()[0].state, OpState::failed);
}

TEST(C10dTransport, NamesTheGroupThatDoesNotExist) {
  EXPECT_THAT([] { make_c10d_transport("nope", nullptr); },
              ThrowsMessage<ConfigError>(HasSubstr("no process group named 'nope'")));
}

TEST(Traffic, SharesOfAnAllReduceAddUpExactly) {
  for (int size : {2, 3, 7}) {
    int64_t total = 0;
    for (int rank = 0; rank < size; ++rank) total += Traffic{rank, size}.all_reduce(13);
    EXPECT_EQ(total, 2 * (size - 1) * 13);
  }
}

}  // namespace
}  // namespace dmuon

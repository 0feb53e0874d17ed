#include "engine/agreement.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <set>

#include "engine/digest.h"
#include "engine/error.h"

namespace dmuon {
namespace {

constexpr const char* kSetup = "(setup)";
const auto kLong = at::TensorOptions().dtype(at::kLong);
const auto kByte = at::TensorOptions().dtype(at::kByte);

at::Tensor gather(Transport& transport, const at::Tensor& mine) {
  at::Tensor all = at::empty({transport.size(), mine.size(0)}, mine.options());
  transport.all_gather(all, mine, kSetup);
  return all;
}

at::Tensor fixed_size_word(const Proposal& mine) {
  Hasher hasher;
  for (const auto& line : mine.lines) hasher.add(line);
  const Digest digest = hasher.digest();
  at::Tensor word = at::zeros({3}, kLong);
  auto* data = word.data_ptr<int64_t>();
  data[0] = static_cast<int64_t>(digest.words[0]);
  data[1] = static_cast<int64_t>(digest.words[1]);
  data[2] = mine.error.empty() ? 0 : 1;
  return word;
}

bool all_agree(const at::Tensor& words) {
  const auto* data = words.data_ptr<int64_t>();
  for (int64_t r = 0; r < words.size(0); ++r) {
    if (data[3 * r] != data[0] || data[3 * r + 1] != data[1] || data[3 * r + 2]) return false;
  }
  return true;
}

std::vector<std::string> gather_texts(Transport& transport, const std::string& mine) {
  at::Tensor length = at::zeros({1}, kLong);
  length.data_ptr<int64_t>()[0] = static_cast<int64_t>(mine.size());
  const at::Tensor lengths = gather(transport, length);
  const int64_t width = std::max<int64_t>(1, lengths.max().item<int64_t>());
  at::Tensor text = at::zeros({width}, kByte);
  std::memcpy(text.data_ptr(), mine.data(), mine.size());
  const at::Tensor all = gather(transport, text);
  std::vector<std::string> texts;
  for (int r = 0; r < transport.size(); ++r) {
    const auto* row = static_cast<const char*>(all.data_ptr()) + r * width;
    texts.emplace_back(row, lengths[r][0].item<int64_t>());
  }
  return texts;
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const auto& line : lines) text += line + "\n";
  return text;
}

std::string ranks_text(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string errors_message(const std::vector<std::string>& errors) {
  std::map<std::string, std::vector<int>> by_text;
  std::vector<std::string> order;
  for (int r = 0; r < static_cast<int>(errors.size()); ++r) {
    if (errors[r].empty()) continue;
    if (by_text[errors[r]].empty()) order.push_back(errors[r]);
    by_text[errors[r]].push_back(r);
  }
  if (order.size() == 1 && by_text[order[0]].size() == errors.size()) return order[0];
  std::string text;
  for (const auto& error : order) {
    text += (text.empty() ? "" : "\n") + ("on " + ranks_text(by_text[error]) + ": " + error);
  }
  return text;
}

// name -> detail -> ranks
using Table = std::map<std::string, std::map<std::string, std::vector<int>>>;

Table table_of(const std::vector<std::string>& texts) {
  Table table;
  for (int r = 0; r < static_cast<int>(texts.size()); ++r) {
    for (size_t begin = 0; begin < texts[r].size();) {
      const size_t end = texts[r].find('\n', begin);
      const std::string line = texts[r].substr(begin, end - begin);
      const size_t tab = line.find('\t');
      table[line.substr(0, tab)][line.substr(tab + 1)].push_back(r);
      begin = end + 1;
    }
  }
  return table;
}

std::vector<int> others(const std::vector<int>& ranks, int size) {
  std::vector<int> rest;
  for (int r = 0; r < size; ++r) {
    if (std::find(ranks.begin(), ranks.end(), r) == ranks.end()) rest.push_back(r);
  }
  return rest;
}

std::string difference_message(const Proposal& mine, const Table& table, int size) {
  constexpr int kListed = 10;
  std::string text = "the ranks do not " + mine.subject + ":";
  int differing = 0;
  for (const auto& [name, details] : table) {
    std::vector<int> having;
    for (const auto& [detail, ranks] : details)
      having.insert(having.end(), ranks.begin(), ranks.end());
    const bool missing = static_cast<int>(having.size()) < size;
    if (!missing && details.size() == 1) continue;
    if (++differing > kListed) continue;
    std::sort(having.begin(), having.end());
    text += "\n  '" + name + "'";
    if (missing) {
      text += ": chosen on " + ranks_text(having) + ", not on " + ranks_text(others(having, size));
    }
    if (details.size() > 1) {
      for (const auto& [detail, ranks] : details) text += "; " + ranks_text(ranks) + ": " + detail;
    }
  }
  if (differing > kListed) text += message("\n  and ", differing - kListed, " more");
  return mine.advice.empty() ? text : text + "\n" + mine.advice;
}

}  // namespace

void agree(Transport& transport, const Proposal& mine) {
  if (all_agree(gather(transport, fixed_size_word(mine)))) return;
  const auto errors = gather_texts(transport, mine.error);
  if (std::any_of(errors.begin(), errors.end(), [](const auto& e) { return !e.empty(); })) {
    throw ConfigError(errors_message(errors));
  }
  const Table table = table_of(gather_texts(transport, join(mine.lines)));
  throw ConfigError(difference_message(mine, table, transport.size()));
}

std::vector<int32_t> from_rank_0(Transport& transport, std::vector<int32_t> values) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(values.size())}, at::kInt);
  std::copy(values.begin(), values.end(), tensor.data_ptr<int32_t>());
  transport.broadcast({{tensor, 0}}, kSetup);
  const auto* data = tensor.data_ptr<int32_t>();
  return {data, data + values.size()};
}

StepVerdict agree_on_step(Transport& transport, const StepWord& mine) {
  at::Tensor word = at::empty({8}, kLong);
  auto* data = word.data_ptr<int64_t>();
  data[0] = mine.any_gradient;
  data[1] = mine.nonfinite;
  data[2] = mine.failed;
  data[3] = mine.sequence, data[4] = ~mine.sequence;
  data[5] = mine.settings, data[6] = ~mine.settings;
  data[7] = mine.gather_again;
  transport.all_reduce(word, ReduceOp::max, "(agreement)");
  return {.any_gradient = data[0] != 0,
          .nonfinite = data[1],
          .sequence_differs = data[3] != ~data[4],
          .settings_differ = data[5] != ~data[6],
          .failed = data[2] != 0,
          .gather_again = data[7] != 0};
}

}  // namespace dmuon

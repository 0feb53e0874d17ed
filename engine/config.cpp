#include "engine/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <optional>
#include <sstream>
#include <tuple>
#include <utility>

#include "engine/error.h"

namespace dmuon {
namespace {

// What a key takes. `table`: anything, checked by whoever reads it.
enum class Kind { boolean, integer, number, string, strings, betas, reuse, table, tables };

const char* to_string(Kind kind) {
  switch (kind) {
    case Kind::boolean:
      return "true or false";
    case Kind::integer:
      return "a whole number";
    case Kind::number:
      return "a number";
    case Kind::string:
      return "a string";
    case Kind::strings:
      return "a list of strings";
    case Kind::betas:
      return "a list of two numbers";
    case Kind::reuse:
      return "true, false or a string";
    case Kind::table:
      return "a table";
    case Kind::tables:
      return "a list of tables";
  }
  return "";
}

struct Key {
  const char* name;
  Kind kind;
};

struct Section {
  const char* name;
  std::vector<Key> keys;
};

// The keywords of dedicate_params, Muon and save_checkpoint; python/dmuon/configuration.py hands
// them on.
const std::vector<Section>& sections() {
  static const std::vector<Section> known{
      {"runtime",
       {{"kind", Kind::string},
        {"include", Kind::strings},
        {"exclude", Kind::strings},
        {"min_ndim", Kind::integer},
        {"reshard_after_forward", Kind::boolean},
        {"hook_boundary_strict", Kind::boolean},
        {"compute_dtype", Kind::string},
        {"tp_buffer_reuse", Kind::reuse},
        {"process_group_policy", Kind::string},
        {"owner_strategy", Kind::string},
        {"owner_cost_model", Kind::string},
        {"max_owners_per_group", Kind::integer},
        {"pack_small_params", Kind::boolean},
        {"memory_limit_bytes", Kind::integer},
        {"independent_dims", Kind::strings},
        {"strict_init", Kind::boolean},
        {"allow_empty", Kind::boolean}}},
      {"policy", {{"defaults", Kind::table}, {"overrides", Kind::tables}}},
      {"muon",
       {{"lr", Kind::number},
        {"momentum", Kind::number},
        {"weight_decay", Kind::number},
        {"nesterov", Kind::boolean},
        {"adjust_lr", Kind::string},
        {"nonfinite", Kind::string},
        {"replicate_async", Kind::boolean},
        {"tp_distributed_gram", Kind::boolean},
        {"tp_distributed_gram_policy", Kind::string}}},
      {"adamw",
       {{"lr", Kind::number},
        {"betas", Kind::betas},
        {"weight_decay", Kind::number},
        {"eps", Kind::number}}},
      {"newton_schulz",
       {{"backend", Kind::string},
        {"steps", Kind::integer},
        {"coefficients", Kind::string},
        {"kernel", Kind::string},
        {"deterministic", Kind::boolean}}},
      {"checkpoint", {{"directory", Kind::string}, {"keep_last", Kind::integer}}}};
  return known;
}

template <class Range>
std::vector<std::string> names_of(const Range& range) {
  std::vector<std::string> names;
  for (const auto& item : range) names.emplace_back(item.name);
  return names;
}

std::string joined(const std::vector<std::string>& words) {
  std::string text;
  for (const auto& word : words) text += (text.empty() ? "" : ", ") + word;
  return text;
}

// Letters to insert, drop or change to turn one word into the other.
int distance(const std::string& a, const std::string& b) {
  std::vector<int> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    int diagonal = std::exchange(row[0], static_cast<int>(i));
    for (size_t j = 1; j <= b.size(); ++j) {
      const int substituted = diagonal + (a[i - 1] != b[j - 1]);
      diagonal = row[j];
      row[j] = std::min({substituted, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

class Reader {
 public:
  explicit Reader(std::string file) : file_(std::move(file)) {}

  ConfigValue::Table read(const toml::table& root) const {
    ConfigValue::Table result;
    for (const auto& [name, node] : root) {
      const Section& section = known(name, sections(), "section");
      const auto* table = node.as_table();
      if (!table)
        fail(node, message("'", section.name, "' is no section; write [", section.name, "]."));
      result.push_back({section.name, {read_section(section, *table)}});
    }
    return result;
  }

 private:
  ConfigValue::Table read_section(const Section& section, const toml::table& table) const {
    ConfigValue::Table result;
    for (const auto& [name, node] : table) {
      const Key& key = known(name, section.keys, message("key of [", section.name, "]"));
      if (!fits(node, key.kind)) {
        fail(node, message(section.name, ".", key.name, " is ", written(node), "; it must be ",
                           to_string(key.kind), "."));
      }
      result.push_back({key.name, value_of(node)});
    }
    return result;
  }

  template <class Items>
  const typename Items::value_type& known(const toml::key& given, const Items& items,
                                          const std::string& what) const {
    const std::string name(given.str());
    for (const auto& item : items) {
      if (item.name == name) return item;
    }
    const auto words = names_of(items);
    const std::string close = nearest_word(name, words);
    const std::string hint = close.empty() ? "" : message("did you mean '", close, "'? ");
    throw ConfigError(message(file_, ":", given.source().begin.line, ": '", name, "' is no known ",
                              what, "; ", hint, "known: ", joined(words), "."));
  }

  static bool all_are(const toml::node& node, bool (toml::node::*is)() const noexcept) {
    const auto* list = node.as_array();
    return list && std::all_of(list->begin(), list->end(),
                               [is](const toml::node& item) { return (item.*is)(); });
  }

  static bool fits(const toml::node& node, Kind kind) {
    switch (kind) {
      case Kind::boolean:
        return node.is_boolean();
      case Kind::integer:
        return node.is_integer();
      case Kind::number:
        return node.is_number();
      case Kind::string:
        return node.is_string();
      case Kind::strings:
        return all_are(node, &toml::node::is_string);
      case Kind::betas:
        return all_are(node, &toml::node::is_number) && node.as_array()->size() == 2;
      case Kind::reuse:
        return node.is_boolean() || node.is_string();
      case Kind::table:
        return node.is_table();
      case Kind::tables:
        return all_are(node, &toml::node::is_table);
    }
    return false;
  }

  ConfigValue value_of(const toml::node& node) const {
    if (const auto* table = node.as_table()) {
      ConfigValue::Table entries;
      for (const auto& [key, item] : *table) {
        entries.push_back({std::string(key.str()), value_of(item)});
      }
      return {std::move(entries)};
    }
    if (const auto* list = node.as_array()) {
      ConfigValue::List items;
      for (const auto& item : *list) items.push_back(value_of(item));
      return {std::move(items)};
    }
    if (const auto flag = node.value_exact<bool>()) return {*flag};
    if (const auto whole = node.value_exact<int64_t>()) return {*whole};
    if (const auto number = node.value_exact<double>()) return {*number};
    if (const auto text = node.value_exact<std::string>()) return {*text};
    fail(node, message(written(node), " is a date or a time, which no key takes."));
  }

  static std::string written(const toml::node& node) {
    std::ostringstream text;
    node.visit([&](const auto& concrete) { text << concrete; });
    return text.str();
  }

  [[noreturn]] void fail(const toml::node& node, const std::string& text) const {
    throw ConfigError(message(file_, ":", node.source().begin.line, ": ", text));
  }

  const std::string file_;
};

}  // namespace

std::string nearest_word(const std::string& given, const std::vector<std::string>& words) {
  std::string best;
  int least = static_cast<int>(given.size()) / 2 + 1;
  for (const auto& word : words) {
    const int steps = distance(given, word);
    if (steps < least) std::tie(best, least) = std::tie(word, steps);
  }
  return best;
}

ConfigValue::Table load_config(const std::filesystem::path& path) {
  std::ifstream file(path);
  if (!file) throw ConfigError(message(path.string(), " cannot be read. Is there such a file?"));
  std::ostringstream text;
  text << file.rdbuf();
  return parse_config(text.str(), path.string());
}

ConfigValue::Table parse_config(const std::string& text, const std::string& name) {
  try {
    return Reader(name).read(toml::parse(text, name));
  } catch (const toml::parse_error& error) {
    throw ConfigError(
        message(name, ":", error.source().begin.line, ": ", error.description(), "."));
  }
}

std::vector<ConfigKey> config_keys() {
  std::vector<ConfigKey> keys;
  for (const Section& section : sections()) {
    for (const Key& key : section.keys) {
      keys.push_back({section.name, key.name, key.kind == Kind::string});
    }
  }
  return keys;
}

}  // namespace dmuon

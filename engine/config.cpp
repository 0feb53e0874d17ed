#include "engine/config.h"

#include <toml++/toml.h>

#include <algorithm>
#include <fstream>
#include <numeric>
#include <optional>
#include <sstream>
#include <tuple>
#include <utility>

#include "engine/config_keys.h"
#include "engine/error.h"

namespace dmuon {
namespace {

using config::Key;
using config::Kind;
using config::Section;
using config::sections;

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
  // `lines`: whether places in it mean something to the user.
  explicit Reader(std::string file, bool lines = true) : file_(std::move(file)), lines_(lines) {}

  ConfigValue::Table read(const toml::table& root) const {
    ConfigValue::Table result;
    for (const auto& [name, node] : root) {
      const Section& section = known(name, sections(), "section");
      const auto* table = node.as_table();
      if (!table)
        fail(node, message("'", section.name, "' is no section; write [", section.name, "]."));
      check(*table, section.keys, section.name, message("key of [", section.name, "]"));
      result.push_back({section.name, value_of(node)});
    }
    return result;
  }

 private:
  void check(const toml::table& table, const std::vector<Key>& keys, const std::string& path,
             const std::string& what) const {
    for (const auto& [name, node] : table) {
      const Key& key = known(name, keys, what);
      const std::string inside = message(path, ".", key.name);
      if (!fits(node, key)) {
        fail(node, message(inside, " is ", written(node), "; ", nearest_option(node, key),
                           "it must be ", wanted(key), "."));
      }
      if (!key.inner.empty()) check_inner(node, key, inside);
    }
  }

  void check_inner(const toml::node& node, const Key& key, const std::string& path) const {
    if (const auto* table = node.as_table()) check(*table, key.inner, path, "key of " + path);
    if (const auto* list = node.as_array()) {
      for (const auto& item : *list) check_inner(item, key, path);
    }
  }

  template <class Items>
  const typename Items::value_type& known(const toml::key& given, const Items& items,
                                          const std::string& what) const {
    const std::string name(given.str());
    for (const auto& item : items) {
      if (item.name == name) return item;
    }
    const auto words = names_of(items);
    const std::string place = config::place_of(name);
    const std::string hint =
        place.empty() ? did_you_mean(name, words) : message("it belongs to ", place, ". ");
    throw ConfigError(message(at(given.source()), "'", name, "' is no known ", what, "; ", hint,
                              "known: ", joined(words), "."));
  }

  static std::string did_you_mean(const std::string& given, const std::vector<std::string>& words) {
    const std::string close = nearest_word(given, words);
    return close.empty() ? "" : message("did you mean '", close, "'? ");
  }

  static std::string nearest_option(const toml::node& node, const Key& key) {
    const auto text = node.value_exact<std::string>();
    return text ? did_you_mean(*text, key.options) : "";
  }

  static bool all_are(const toml::node& node, bool (toml::node::*is)() const noexcept) {
    const auto* list = node.as_array();
    return list && std::all_of(list->begin(), list->end(),
                               [is](const toml::node& item) { return (item.*is)(); });
  }

  static bool is_a(const toml::node& node, Kind kind) {
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
      case Kind::names:
        return node.is_string() || all_are(node, &toml::node::is_string);
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

  static bool lies_in(const toml::node& node, const config::Range& range) {
    if (const auto* list = node.as_array()) {
      return std::all_of(list->begin(), list->end(),
                         [&](const toml::node& item) { return lies_in(item, range); });
    }
    const auto number = node.value<double>();
    return !number || (*number >= range.least && *number < range.below);
  }

  static bool fits(const toml::node& node, const Key& key) {
    if (!is_a(node, key.kind) || !lies_in(node, key.range)) return false;
    const auto text = node.value_exact<std::string>();
    if (!text) return true;
    if (key.options.empty()) return !text->empty() && text->find('\0') == std::string::npos;
    return std::find(key.options.begin(), key.options.end(), *text) != key.options.end();
  }

  static ConfigValue value_of(const toml::node& node) {
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
    return {*node.value_exact<std::string>()};
  }

  static std::string written(const toml::node& node) {
    std::ostringstream text;
    if (const auto number = node.value_exact<double>()) {
      text << *number;  // toml++ writes all 17 digits
    } else if (const auto* list = node.as_array()) {
      for (const auto& item : *list)
        text << (&item == &list->front() ? "[" : ", ") << written(item);
      text << (list->empty() ? "[]" : "]");
    } else {
      node.visit([&](const auto& concrete) { text << concrete; });
    }
    return text.str();
  }

  [[noreturn]] void fail(const toml::node& node, const std::string& text) const {
    throw ConfigError(at(node.source()) + text);
  }

  std::string at(const toml::source_region& source) const {
    return lines_ ? message(file_, ":", source.begin.line, ": ") : file_ + ": ";
  }

  const std::string file_;
  const bool lines_;
};

const Key& key_of(const std::string& section, const std::string& key) {
  for (const Section& known : sections()) {
    for (const Key& entry : known.keys) {
      if (known.name == section && entry.name == key) return entry;
    }
  }
  throw ConfigError(message("there is no ", section, ".", key, " in a dmuon.toml."));
}

bool is_bare_text(Kind kind, const std::string& value) {
  if (kind == Kind::reuse) return value != "true" && value != "false";
  return kind == Kind::string;
}

// Lists may be written without their brackets, and words in them without quotes.
std::string bracketed(Kind kind, const std::string& value) {
  if (value.starts_with('[')) return value;
  if (kind == Kind::betas) return "[" + value + "]";
  if (kind != Kind::strings) return value;
  std::string text;
  std::istringstream words(value);
  for (std::string word; std::getline(words, word, ',');) {
    text += message(text.empty() ? "" : ", ", "'", word, "'");
  }
  return "[" + text + "]";
}

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

ConfigValue::Table parse_config_value(const std::string& section, const std::string& key,
                                      const std::string& value, const std::string& name) {
  const Key& known = key_of(section, key);
  toml::table entries;
  if (is_bare_text(known.kind, value)) {
    entries.insert(key, value);
  } else {
    try {
      toml::table parsed = toml::parse(key + " = " + bracketed(known.kind, value), name);
      if (parsed.size() == 1) entries = std::move(parsed);
    } catch (const toml::parse_error&) {  // what is wanted says more
    }
  }
  if (!entries.empty()) {
    return Reader(name, /*lines=*/false).read(toml::table{{section, std::move(entries)}});
  }
  throw ConfigError(message(name, " is '", value, "'; it must be ", wanted(known), "."));
}

std::vector<ConfigKey> config_keys() {
  std::vector<ConfigKey> keys;
  for (const Section& section : sections()) {
    for (const Key& key : section.keys) {
      keys.push_back({section.name, key.name});
    }
  }
  return keys;
}

}  // namespace dmuon

// What a dmuon.toml may hold: its sections, their keys, and what each key takes.
#pragma once
#include <limits>
#include <string>
#include <vector>

namespace dmuon::config {

// `names`: a string or a list of them. `tables`: a list of tables.
enum class Kind { boolean, integer, number, string, strings, names, betas, reuse, table, tables };

// least <= value < below, of a number or of each in a list. NaN lies in none.
struct Range {
  double least = -std::numeric_limits<double>::infinity();
  double below = std::numeric_limits<double>::infinity();
};

struct Key {
  const char* name;
  Kind kind;
  Range range = {};
  std::vector<std::string> options = {};  // of a string; none: any but the empty one
  std::vector<Key> inner = {};            // of a table or of each in a list
};

struct Section {
  const char* name;
  std::vector<Key> keys;
};

// The keywords of dedicate_params, Muon and save_checkpoint; python/dmuon/configuration.py hands
// them on.
const std::vector<Section>& sections();

// "a number in [0, 1)", "one of 'gram', 'direct'"
std::string wanted(const Key& key);

// Where a key that is given in a wrong section belongs, e.g. "newton_schulz.steps" for ns_steps, as
// the keyword of dmuon.Muon is called; "" where it is known nowhere.
std::string place_of(const std::string& key);

}  // namespace dmuon::config

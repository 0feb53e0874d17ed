// dmuon.toml: read, checked, handed out as plain values. Knows no torch.
#pragma once
#include <cstdint>
#include <filesystem>
#include <string>
#include <variant>
#include <vector>

namespace dmuon {

struct ConfigEntry;

// A TOML value. Tables keep the order of the file.
struct ConfigValue {
  using List = std::vector<ConfigValue>;
  using Table = std::vector<ConfigEntry>;
  std::variant<bool, int64_t, double, std::string, List, Table> value;
};

struct ConfigEntry {
  std::string key;
  ConfigValue value;
};

// The sections of the file with what they hold, every key known and of the right type.
// Throws ConfigError: the file cannot be read or is no TOML; a key or section is unknown (with the
// nearest known one); a value has the wrong type, is out of range or none of the options. It names
// file, line and key.
ConfigValue::Table load_config(const std::filesystem::path& path);
// The same of a text; `name` stands for the file in errors.
ConfigValue::Table parse_config(const std::string& text, const std::string& name);
// The same of one value, as TOML writes it, strings without quotes and lists without brackets: what
// `name`, a variable of the environment, says.
ConfigValue::Table parse_config_value(const std::string& section, const std::string& key,
                                      const std::string& value, const std::string& name);

// Every section and key.
struct ConfigKey {
  std::string section, key;
};
std::vector<ConfigKey> config_keys();

// Of some words the one that `given` was probably meant to be: at most half of its letters are
// other ones. "" where there is none.
std::string nearest_word(const std::string& given, const std::vector<std::string>& words);

}  // namespace dmuon

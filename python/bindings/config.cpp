// Binds engine/config.h.
#include "engine/config.h"

#include "python/bindings/bindings.h"

namespace dmuon {
namespace {

py::object as_python(const ConfigValue& value);

py::dict as_dict(const ConfigValue::Table& table) {
  py::dict dict;
  for (const auto& [key, value] : table) dict[py::str(key)] = as_python(value);
  return dict;
}

py::object as_python(const ConfigValue& value) {
  if (const auto* table = std::get_if<ConfigValue::Table>(&value.value)) return as_dict(*table);
  if (const auto* list = std::get_if<ConfigValue::List>(&value.value)) {
    py::list items;
    for (const auto& item : *list) items.append(as_python(item));
    return items;
  }
  if (const auto* flag = std::get_if<bool>(&value.value)) return py::bool_(*flag);
  if (const auto* whole = std::get_if<int64_t>(&value.value)) return py::int_(*whole);
  if (const auto* number = std::get_if<double>(&value.value)) return py::float_(*number);
  return py::str(std::get<std::string>(value.value));
}

}  // namespace

void bind_config(py::module_& m) {
  m.def(
      "load_config", [](const std::string& path) { return as_dict(load_config(path)); },
      py::arg("path"));
  m.def(
      "parse_config_value",
      [](const std::string& section, const std::string& key, const std::string& value,
         const std::string& name) {
        return as_dict(parse_config_value(section, key, value, name));
      },
      py::arg("section"), py::arg("key"), py::arg("value"), py::arg("name"));
  m.def("config_keys", [] {
    std::vector<std::pair<std::string, std::string>> keys;
    for (const auto& [section, key] : config_keys()) keys.emplace_back(section, key);
    return keys;
  });
}

}  // namespace dmuon

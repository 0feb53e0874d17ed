#include "engine/config_keys.h"

#include <cmath>
#include <map>

#include "engine/error.h"

namespace dmuon::config {
namespace {

constexpr Range kNotNegative{.least = 0};
constexpr Range kCount{.least = 1};
constexpr Range kFraction{.least = 0, .below = 1};
constexpr Range kSteps{.least = 1, .below = 1001};  // kMostSteps of kernels/checks.h

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
    case Kind::names:
      return "a string or a list of strings";
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

std::string one_of(const std::vector<std::string>& options) {
  std::string text = "one of ";
  for (const std::string& option : options) {
    text += message(&option == options.data() ? "'" : ", '", option, "'");
  }
  return text;
}

const std::vector<Key>& policy_keys() {
  static const std::vector<std::string> dtypes{"float32", "bfloat16", "float16", "float64"};
  static const std::vector<Key> keys{
      {"route", Kind::string, {}, {"muon", "adamw", "sharded_adamw"}},
      {"view", Kind::string, {}, {"flatten", "batch"}},
      {"param_dtype", Kind::string, {}, dtypes},
      {"grad_dtype", Kind::string, {}, dtypes},
      {"output_dtype", Kind::string, {}, dtypes},
      {"cast_forward_inputs", Kind::boolean},
      {"master_dtype", Kind::string, {}, dtypes},
      {"optim_dtype", Kind::string, {}, dtypes}};
  return keys;
}

}  // namespace

const std::vector<Section>& sections() {
  static const std::vector<Section> known{
      {"runtime",
       {{"kind", Kind::string, {}, {"fsdp2", "ddp", "ddp_tp"}},
        {"include", Kind::strings},
        {"exclude", Kind::strings},
        {"min_ndim", Kind::integer, kNotNegative},
        {"reshard_after_forward", Kind::boolean},
        {"hook_boundary_strict", Kind::boolean},
        {"compute_dtype", Kind::string, {}, {"float32", "bfloat16", "float16", "float64"}},
        {"tp_buffer_reuse", Kind::reuse, {}, {"gather", "scatter", "all"}},
        {"process_group_policy", Kind::string, {}, {"isolated", "shared"}},
        {"owner_strategy", Kind::string, {}, {"lpt", "round_robin"}},
        {"owner_cost_model", Kind::string, {}, {"optimizer", "numel"}},
        {"max_owners_per_group", Kind::integer, kCount},
        {"pack_small_params", Kind::boolean},
        {"memory_limit_bytes", Kind::integer, kCount},
        {"independent_dims", Kind::strings},
        {"strict_init", Kind::boolean},
        {"allow_empty", Kind::boolean}}},
      {"policy",
       {{"defaults", Kind::table, {}, {}, policy_keys()},
        {"overrides",
         Kind::tables,
         {},
         {},
         {{"name", Kind::names}, {"set", Kind::table, {}, {}, policy_keys()}}}}},
      {"muon",
       {{"lr", Kind::number, kNotNegative},
        {"momentum", Kind::number, kFraction},
        {"weight_decay", Kind::number, kNotNegative},
        {"nesterov", Kind::boolean},
        {"adjust_lr", Kind::string, {}, {"match_rms_adamw", "original", "spectral_unclamped"}},
        {"nonfinite", Kind::string, {}, {"raise", "skip", "propagate"}},
        {"replicate_async", Kind::boolean},
        {"tp_distributed_gram", Kind::boolean},
        {"tp_distributed_gram_policy", Kind::string, {}, {"beneficial", "always", "never"}}}},
      {"adamw",
       {{"lr", Kind::number, kNotNegative},
        {"betas", Kind::betas, kFraction},
        {"weight_decay", Kind::number, kNotNegative},
        {"eps", Kind::number, kNotNegative}}},
      {"newton_schulz",
       {{"backend", Kind::string, {}, {"gram", "direct"}},
        {"steps", Kind::integer, kSteps},
        {"coefficients", Kind::string, {}, {"polar_express", "you", "jordan"}},
        {"kernel", Kind::string, {}, {"auto"}},
        {"deterministic", Kind::boolean}}},
      {"checkpoint", {{"directory", Kind::string}, {"keep_last", Kind::integer, kCount}}}};
  return known;
}

std::string wanted(const Key& key) {
  const auto [least, below] = key.range;
  if (!key.options.empty()) {
    return message(key.kind == Kind::reuse ? "true, false or " : "", one_of(key.options));
  }
  if (std::isinf(least)) {
    return message(to_string(key.kind), key.kind == Kind::string ? " that is not empty" : "");
  }
  const bool whole = key.kind == Kind::integer;
  if (std::isinf(below)) {
    return message(to_string(key.kind), " of at least ", least, whole ? "" : ", and finite");
  }
  if (whole) return message(to_string(key.kind), " from ", least, " to ", below - 1);
  return message(to_string(key.kind), " in [", least, ", ", below, ")");
}

std::string place_of(const std::string& key) {
  static const std::map<std::string, std::string> keywords{
      {"ns_steps", "newton_schulz.steps"},
      {"ns_backend", "newton_schulz.backend"},
      {"adamw_lr", "adamw.lr"},
      {"adamw_betas", "adamw.betas"},
      {"adamw_weight_decay", "adamw.weight_decay"},
      {"adamw_eps", "adamw.eps"},
      {"param_policy", "policy"}};
  const auto keyword = keywords.find(key);
  if (keyword != keywords.end()) return keyword->second;
  for (const Section& section : sections()) {
    for (const Key& known : section.keys) {
      if (key == known.name) return message(section.name, ".", key);
    }
  }
  return "";
}

}  // namespace dmuon::config

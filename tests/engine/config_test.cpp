#include "engine/config.h"

#include <gmock/gmock.h>

#include "engine/error.h"

namespace dmuon {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;
using ::testing::StartsWith;
using ::testing::ThrowsMessage;

const ConfigValue& at(const ConfigValue::Table& table, const std::string& key) {
  for (const auto& entry : table) {
    if (entry.key == key) return entry.value;
  }
  throw std::out_of_range(key);
}

const ConfigValue::Table& section(const ConfigValue::Table& root, const std::string& name) {
  return std::get<ConfigValue::Table>(at(root, name).value);
}

template <class T>
T get(const ConfigValue::Table& table, const std::string& key) {
  return std::get<T>(at(table, key).value);
}

auto refuses(const std::string& text, const auto&... words) {
  const auto parse = [text] { parse_config(text, "a.toml"); };
  EXPECT_THAT(parse, ThrowsMessage<ConfigError>(AllOf(HasSubstr("a.toml:"), HasSubstr(words)...)));
}

TEST(Config, HandsOutWhatTheFileSays) {
  const auto root = parse_config(R"(
[runtime]
include = ["*_proj", "*.experts"]
memory_limit_bytes = 8_000_000_000
tp_buffer_reuse = "gather"

[muon]
lr = 0.02
nesterov = false

[adamw]
betas = [0.9, 0.95]
lr = 1
)",
                                 "a.toml");
  EXPECT_THAT(get<ConfigValue::List>(section(root, "runtime"), "include"), SizeIs(2));
  EXPECT_EQ(get<int64_t>(section(root, "runtime"), "memory_limit_bytes"), 8'000'000'000);
  EXPECT_EQ(get<std::string>(section(root, "runtime"), "tp_buffer_reuse"), "gather");
  EXPECT_EQ(get<double>(section(root, "muon"), "lr"), 0.02);
  EXPECT_FALSE(get<bool>(section(root, "muon"), "nesterov"));
  EXPECT_EQ(get<int64_t>(section(root, "adamw"), "lr"), 1);  // a number may be whole
}

TEST(Config, KeepsTablesInsideThePolicyAsTheyAre) {
  const auto root = parse_config(R"(
[policy.defaults]
param_dtype = "bfloat16"
[[policy.overrides]]
name = ["router"]
set = {route = "adamw"}
)",
                                 "a.toml");
  EXPECT_EQ(get<std::string>(section(section(root, "policy"), "defaults"), "param_dtype"),
            "bfloat16");
  EXPECT_THAT(get<ConfigValue::List>(section(root, "policy"), "overrides"), SizeIs(1));
}

TEST(Config, AnEmptyFileSaysNothing) { EXPECT_THAT(parse_config("", "a.toml"), IsEmpty()); }

TEST(Config, NamesLineAndNearestKeyOfWhatItDoesNotKnow) {
  refuses("\n\n[muon]\nmomentun = 0.9\n", ":4:", "'momentun'", "did you mean 'momentum'",
          "weight_decay");
  refuses("[moun]\nlr = 1\n", ":1:", "'moun'", "did you mean 'muon'", "newton_schulz");
  refuses("[muon]\nzzz = 1\n", ":2:", "'zzz'", "known: lr, momentum");
  refuses("lr = 0.1\n", ":1:", "'lr'", "section");
}

TEST(Config, NamesLineValueAndTypeOfWhatDoesNotFit) {
  refuses("[muon]\nlr = \"fast\"\n", ":2:", "muon.lr", "'fast'", "a number");
  refuses("[muon]\n\nnesterov = 1\n", ":3:", "muon.nesterov", "1", "true or false");
  refuses("[newton_schulz]\nsteps = 5.5\n", "newton_schulz.steps", "5.5", "a whole number");
  refuses("[adamw]\nbetas = [0.9]\n", "adamw.betas", "two numbers");
  refuses("[runtime]\ninclude = \"*_proj\"\n", "runtime.include", "a list of strings");
  refuses("[runtime]\ninclude = [1]\n", "runtime.include", "a list of strings");
  refuses("[policy]\noverrides = [1]\n", "policy.overrides", "a list of tables");
  refuses("muon = 3\n", "muon", "[muon]");
  refuses("[policy.defaults]\nroute = 2020-01-01\n", "route is 2020-01-01", "one of 'muon'");
}

TEST(Config, NamesTheRangeOrTheOptionsOfWhatLiesOutside) {
  refuses("[muon]\nlr = -1\n", ":2:", "muon.lr is -1", "a number of at least 0, and finite");
  refuses("[muon]\nlr = inf\n", "muon.lr is inf", "finite");
  refuses("[muon]\nlr = nan\n", "muon.lr is nan", "finite");
  refuses("[muon]\nmomentum = 1.0\n", "muon.momentum is 1", "a number in [0, 1)");
  refuses("[adamw]\nbetas = [0.9, 1.5]\n", "adamw.betas", "a list of two numbers in [0, 1)");
  refuses("[checkpoint]\nkeep_last = 0\n", "keep_last is 0", "a whole number of at least 1");
  refuses("[runtime]\nmin_ndim = -3\n", "min_ndim is -3", "a whole number of at least 0");
  refuses("[newton_schulz]\nsteps = 1001\n", "steps is 1001", "from 1 to 1000");
  refuses("\n[runtime]\nkind = \"fsdp\"\n", ":3:", "did you mean 'fsdp2'", "'ddp', 'ddp_tp'");
  refuses("[newton_schulz]\ncoefficients = \"jordn\"\n", "did you mean 'jordan'", "'you'");
  refuses("[runtime]\ntp_buffer_reuse = \"some\"\n", "true, false or one of 'gather'");
  parse_config("[muon]\nlr = 0\n[adamw]\nbetas = [0, 0.5]\n[runtime]\ntp_buffer_reuse = true\n",
               "a.toml");
}

TEST(Config, ReadsThePolicyToItsLastKey) {
  refuses("[policy.defaults]\n\nrout = \"muon\"\n", ":3:", "'rout'", "did you mean 'route'");
  refuses("[policy.defaults]\nroute = \"moun\"\n", ":2:", "policy.defaults.route is 'moun'",
          "did you mean 'muon'", "'sharded_adamw'");
  refuses("[policy.defaults]\ncast_forward_inputs = 3\n", "is 3", "true or false");
  refuses("[[policy.overrides]]\nname = 1\n", ":2:", "policy.overrides.name is 1",
          "a string or a list of strings");
  refuses("[[policy.overrides]]\nname = \"a\"\nset = {param_dtype = \"half\"}\n",
          ":3:", "policy.overrides.set.param_dtype is 'half'", "'float16'");
}

TEST(Config, TakesNoEmptyString) {
  refuses("[checkpoint]\ndirectory = \"\"\n", "directory is ''", "not empty");
}

TEST(Config, NamesTheSectionOfAKeyThatBelongsElsewhere) {
  refuses("[muon]\nns_steps = 5\n", "'ns_steps'", "it belongs to newton_schulz.steps");
  refuses("[muon]\nadamw_lr = 5\n", "it belongs to adamw.lr");
  refuses("[runtime]\nkeep_last = 5\n", "it belongs to checkpoint.keep_last");
}

TEST(Config, WritesNumbersAsTheyWereWritten) {
  refuses("[newton_schulz]\nsteps = 0.1\n", "steps is 0.1;");
  refuses("[adamw]\nbetas = [0.9, 'a']\n", "betas is [0.9, 'a'];");
  refuses("[adamw]\nbetas = []\n", "betas is [];");
}

TEST(Config, OfAVariableNamesItWithoutALine) {
  const auto text = [](const std::string& value) {
    try {
      parse_config_value("muon", "lr", value, "DMUON_MUON_LR");
    } catch (const ConfigError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(text("-1"),
            "DMUON_MUON_LR: muon.lr is -1; it must be a number of at least 0, and finite.");
  EXPECT_EQ(text("fast"),
            "DMUON_MUON_LR is 'fast'; it must be a number of at least 0, and finite.");
  EXPECT_THAT(text("1\n[adamw]\nlr=2"), HasSubstr("a number of at least 0"));
  EXPECT_THAT(text("1\nmomentum = 0"), HasSubstr("a number of at least 0"));
  EXPECT_EQ(text("0.5"), "");
}

TEST(Config, TakesVariablesWithoutQuotesAndBrackets) {
  const auto value = [](const char* section_name, const char* key, const char* text) {
    return section(parse_config_value(section_name, key, text, "X"), section_name);
  };
  EXPECT_EQ(get<std::string>(value("runtime", "tp_buffer_reuse", "gather"), "tp_buffer_reuse"),
            "gather");
  EXPECT_EQ(get<bool>(value("runtime", "tp_buffer_reuse", "true"), "tp_buffer_reuse"), true);
  EXPECT_THAT(get<ConfigValue::List>(value("runtime", "include", "*_proj,*.experts"), "include"),
              SizeIs(2));
  EXPECT_THAT(get<ConfigValue::List>(value("runtime", "include", "['*_proj']"), "include"),
              SizeIs(1));
  EXPECT_THAT(get<ConfigValue::List>(value("adamw", "betas", "0.9, 0.95"), "betas"), SizeIs(2));
  EXPECT_EQ(get<std::string>(value("checkpoint", "directory", "a \"b\""), "directory"), "a \"b\"");
}

TEST(Config, NamesTheLineOfWhatIsNoToml) {
  refuses("[muon]\nlr = \n", ":2:");
  refuses("[muon]\nlr = 1\nlr = 2\n", ":3:");
}

TEST(Config, NamesAFileThatIsNotThere) {
  EXPECT_THAT([] { load_config("/nowhere/dmuon.toml"); },
              ThrowsMessage<ConfigError>(HasSubstr("/nowhere/dmuon.toml cannot be read")));
}

TEST(Config, TheNearestWordDiffersInFewLetters) {
  const std::vector<std::string> words{"lr", "momentum", "weight_decay"};
  EXPECT_EQ(nearest_word("weigth_decay", words), "weight_decay");
  EXPECT_EQ(nearest_word("momentm", words), "momentum");
  EXPECT_EQ(nearest_word("epsilon", words), "");
  EXPECT_EQ(nearest_word("", words), "");
}

}  // namespace
}  // namespace dmuon

#include "benchmarks/plan/lists.h"

#include <algorithm>
#include <random>
#include <string>

namespace dmuon::bench {
namespace {

struct Shape {
  std::string name;
  int64_t rows = 0, cols = 0, batch = 1;
};

void add_block(std::vector<Matrix>& list, const std::string& block,
               const std::vector<Shape>& shapes, int64_t tp) {
  for (const Shape& shape : shapes) {
    const int64_t longer = std::max(shape.rows, shape.cols);
    const int64_t shard = shape.batch * std::min(shape.rows, shape.cols) * ((longer + tp - 1) / tp);
    list.push_back({.name = block + "." + shape.name + ".weight",
                    .unit = block,
                    .layer = block,
                    .batch = shape.batch,
                    .rows = shape.rows,
                    .cols = shape.cols,
                    .state_bytes = 4 * shape.batch * shape.rows * shape.cols,
                    .shard_bytes = 6 * shard});
  }
}

std::string layer(int i) { return "model.layers." + std::to_string(i); }

std::vector<Matrix> dense(int layers, const std::vector<Shape>& shapes, int64_t tp) {
  std::vector<Matrix> list;
  for (int i = 0; i < layers; ++i) add_block(list, layer(i), shapes, tp);
  return list;
}

std::vector<Matrix> llama(int layers, int64_t d, int64_t ffn, int64_t tp) {
  return dense(layers,
               {{"self_attn.q_proj", d, d},
                {"self_attn.k_proj", 1024, d},
                {"self_attn.v_proj", 1024, d},
                {"self_attn.o_proj", d, d},
                {"mlp.gate_proj", ffn, d},
                {"mlp.up_proj", ffn, d},
                {"mlp.down_proj", d, ffn}},
               tp);
}

std::vector<Shape> mlp(const std::string& name, int64_t d, int64_t ffn) {
  return {
      {name + ".gate_proj", ffn, d}, {name + ".up_proj", ffn, d}, {name + ".down_proj", d, ffn}};
}

void add_experts(std::vector<Matrix>& list, const std::string& block, int count, int64_t d,
                 int64_t ffn, int64_t tp) {
  for (int e = 0; e < count; ++e) {
    add_block(list, block, mlp("mlp.experts." + std::to_string(e), d, ffn), tp);
  }
}

}  // namespace

std::vector<Matrix> gpt2(int64_t tp) {
  return dense(12,
               {{"attn.c_attn", 768, 2304},
                {"attn.c_proj", 768, 768},
                {"mlp.c_fc", 768, 3072},
                {"mlp.c_proj", 3072, 768}},
               tp);
}

std::vector<Matrix> llama3_8b(int64_t tp) { return llama(32, 4096, 14336, tp); }
std::vector<Matrix> llama3_70b(int64_t tp) { return llama(80, 8192, 28672, tp); }
std::vector<Matrix> deep_llama(int64_t tp) { return llama(14'286, 4096, 14336, tp); }

std::vector<Matrix> qwen3_30b_a3b(int64_t tp) {
  return dense(48,
               {{"self_attn.q_proj", 4096, 2048},
                {"self_attn.k_proj", 512, 2048},
                {"self_attn.v_proj", 512, 2048},
                {"self_attn.o_proj", 2048, 4096},
                {"mlp.gate", 128, 2048},
                {"mlp.experts.gate_up_proj", 1536, 2048, 128},
                {"mlp.experts.down_proj", 2048, 768, 128}},
               tp);
}

std::vector<Matrix> deepseek_v3(int64_t tp) {
  std::vector<Matrix> list;
  for (int i = 0; i < 61; ++i) {
    add_block(list, layer(i),
              {{"self_attn.q_a_proj", 1536, 7168},
               {"self_attn.q_b_proj", 24576, 1536},
               {"self_attn.kv_a_proj_with_mqa", 576, 7168},
               {"self_attn.kv_b_proj", 32768, 512},
               {"self_attn.o_proj", 7168, 16384}},
              tp);
    if (i < 3) {
      add_block(list, layer(i), mlp("mlp", 7168, 18432), tp);
      continue;
    }
    add_block(list, layer(i), {{"mlp.gate", 256, 7168}}, tp);
    add_block(list, layer(i), mlp("mlp.shared_experts", 7168, 2048), tp);
    add_experts(list, layer(i), 256, 7168, 2048, tp);
  }
  return list;
}

std::vector<Matrix> experts(int64_t tp) {
  std::vector<Matrix> list;
  for (int i = 0; i < 128; ++i) {
    add_block(list, layer(i),
              {{"self_attn.q_proj", 4096, 4096},
               {"self_attn.k_proj", 1024, 4096},
               {"self_attn.v_proj", 1024, 4096},
               {"self_attn.o_proj", 4096, 4096}},
              tp);
    if (i < 32) add_block(list, layer(i), {{"mlp.router", 259, 4096}}, tp);
    add_experts(list, layer(i), 259, 4096, 1536, tp);
  }
  return list;
}

std::vector<Matrix> random_shapes(int64_t tp) {
  std::mt19937_64 random(7);
  std::vector<Matrix> list;
  for (int i = 0; i < 100'000; ++i) {
    const auto rows = static_cast<int64_t>(256 + random() % 8192);
    const auto cols = static_cast<int64_t>(256 + random() % 8192);
    add_block(list, "blocks." + std::to_string(i / 7), {{"m" + std::to_string(i % 7), rows, cols}},
              tp);
  }
  return list;
}

}  // namespace dmuon::bench

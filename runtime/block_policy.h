// Chooses the block length of each speculative pass: the one that gives the most tokens a second,
// by what passes of each length cost and how many drafts were accepted lately. 1 is plain decoding.
//
// Costs are measured as passes go: of each length the cheapest of the last few counts, since noise
// only makes a pass slower. A length not tried twice yet is taken to cost what the next shorter one
// does, so that it is tried, from short to long. When no length beats plain decoding, speculation
// pauses, and is tried again after 16, 32, ... 256 tokens.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace glimmer {

class BlockPolicy {
 public:
  // Blocks of at most max_block tokens, at least 2 (std::invalid_argument).
  explicit BlockPolicy(int64_t max_block);

  // Forgets what was accepted, for another text, but not what passes cost.
  void restart();
  // The length of the next block, 1 … min(limit, max_block).
  int64_t choose(int64_t limit);
  // A pass of this length accepted so many drafts and took so long, all told.
  void observe(int64_t block, int64_t accepted, double seconds);

  // Expected tokens of a pass.
  double tokens(int64_t block) const;
  // Expected seconds of a pass; 0 before a plain one was measured.
  double cost(int64_t block) const;
  // The measured seconds by length, [max_block + 1]; 0 where none was.
  std::vector<double> measured() const;

 private:
  static constexpr int kKept = 4;  // measurements of a length that count

  struct Costs {
    std::array<double, kKept> seconds{};
    int64_t count = 0;
    double least() const;
  };

  double acceptance(int64_t depth) const;
  int64_t best(int64_t limit) const;

  int64_t max_block_;
  std::vector<Costs> costs_;              // by block length
  std::vector<double> tried_, accepted_;  // by depth: drafts verified, and accepted; fading
  int64_t pause_ = 0, next_pause_;
};

}  // namespace glimmer

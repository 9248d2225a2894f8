// Prepared calls, by keys that hold everything that they depend on.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "lock.hpp"

namespace convgrad {

constexpr int kKeyWords = 160;

struct Key {
  uint64_t hash = 0;
  int words = 0;
  uint64_t word[kKeyWords];
};

// Appends a word; false if it does not fit.
bool add(Key* key, uint64_t word);

// The key of a prepared call: the first member of what is kept in a table.
struct Kept {
  uint64_t* key;
  uint64_t hash, words;
};

class CallTable {
 public:
  // Returns what is kept for a key, or null.
  Kept* find(const Key& key);

  // Keeps a call, which must stay alive for good; false if there is no room.
  bool keep(const Key& key, Kept* call);

 private:
  Kept** place(const uint64_t* words, uint64_t count, uint64_t hash);
  bool grow();

  Lock lock_;
  Kept** calls_ = nullptr;
  uint64_t size_ = 0, used_ = 0;  // the size is a power of two
};

}  // namespace convgrad

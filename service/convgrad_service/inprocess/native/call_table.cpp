#include "call_table.hpp"

extern "C" {
void* malloc(size_t);
void* calloc(size_t, size_t);
void free(void*);
int memcmp(const void*, const void*, size_t);
void* memcpy(void*, const void*, size_t);
}

namespace convgrad {
namespace {

constexpr uint64_t kMostCalls = 1 << 16;

}  // namespace

bool add(Key* key, uint64_t word) {
  if (key->words == kKeyWords) return false;
  key->word[key->words++] = word;
  key->hash = (key->hash ^ word) * 0x9e3779b97f4a7c15u;
  key->hash ^= key->hash >> 29;
  return true;
}

// The place of a key: its call, or null where it would be. Requires: the lock, and a table.
Kept** CallTable::place(const uint64_t* words, uint64_t count, uint64_t hash) {
  for (uint64_t i = hash & (size_ - 1);; i = (i + 1) & (size_ - 1)) {
    Kept* call = calls_[i];
    if (call == nullptr) return &calls_[i];
    if (call->hash == hash && call->words == count &&
        memcmp(call->key, words, count * sizeof(uint64_t)) == 0) {
      return &calls_[i];
    }
  }
}

Kept* CallTable::find(const Key& key) {
  lock_.take();
  Kept* call = size_ ? *place(key.word, key.words, key.hash) : nullptr;
  lock_.give();
  return call;
}

bool CallTable::grow() {
  const uint64_t size = size_ ? 2 * size_ : 1024;
  auto** fresh = static_cast<Kept**>(calloc(size, sizeof(Kept*)));
  if (fresh == nullptr) return false;
  Kept** const old = calls_;
  const uint64_t count = size_;
  calls_ = fresh;
  size_ = size;
  for (uint64_t i = 0; i < count; ++i) {
    if (old[i] != nullptr) *place(old[i]->key, old[i]->words, old[i]->hash) = old[i];
  }
  free(old);
  return true;
}

bool CallTable::keep(const Key& key, Kept* call) {
  const size_t bytes = static_cast<size_t>(key.words) * sizeof(uint64_t);
  call->key = static_cast<uint64_t*>(malloc(bytes));
  if (call->key == nullptr) return false;
  memcpy(call->key, key.word, bytes);
  call->hash = key.hash;
  call->words = static_cast<uint64_t>(key.words);
  lock_.take();
  const bool room = used_ < kMostCalls && (2 * used_ < size_ || grow());
  if (room) {
    Kept** const at = place(call->key, call->words, call->hash);
    used_ += *at == nullptr;
    *at = call;
  }
  lock_.give();
  return room;
}

}  // namespace convgrad

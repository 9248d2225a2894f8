#pragma once

extern "C" int sched_yield();

namespace convgrad {

class Lock {
 public:
  void take() {
    while (__atomic_exchange_n(&taken_, 1, __ATOMIC_ACQUIRE) != 0) sched_yield();
  }
  void give() { __atomic_store_n(&taken_, 0, __ATOMIC_RELEASE); }

 private:
  int taken_ = 0;
};

}  // namespace convgrad

"""The general GPU kernels run on the CPU, thread by thread, where there is no GPU.

Their sources are compiled as C++ by the compiler that the CPU kernels use: each thread of a block
is a coroutine, and a barrier passes the turn to the next. Slow, and deaf to races that depend on
timing; but what a kernel computes, where it reads and writes, and whether all of a block meets at
each barrier are as on a GPU. Kernels with instructions of their own (mma, cp.async) are left out.
"""

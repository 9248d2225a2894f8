"""GPU kernels run on the CPU, thread by thread, where there is no GPU.

Their sources are compiled as C++ by the compiler that the CPU kernels use. Each thread of a block
is a coroutine: a barrier passes the turn to the next, and what a warp does together (mma, ldmatrix,
shuffles) is done when the last of its lanes is there. Headers in ``kernels/`` stand in for those
of the same names that are written in assembly. Asynchronous copies arrive when they are waited
for, shared memory starts as rubbish, and turns go to and fro, so that what lacks a wait or a
barrier shows. Each buffer ends where memory that nobody may touch begins, and shared memory where
the launch's size says, from as odd an address as it may have on a GPU.
Slow, and deaf to races that depend on timing; but what a kernel computes, where it reads and
writes, and whether its threads meet where they must are as on a GPU.
"""

"""An emulator that runs GPU kernels on the CPU, thread by thread.

Kernel sources are compiled as C++ with the compiler of the CPU kernels. Each thread of a block is a
coroutine. A barrier switches to the next thread, and warp-wide instructions (mma, ldmatrix,
shuffles) execute when the last lane arrives. Headers in ``kernels/`` replace those that use inline
assembly.

To expose a missing wait or barrier, asynchronous copies complete as late as a wait allows (TMA
copies sometimes at once), shared memory is initialised with garbage, and the order of threads
alternates. Each buffer ends at an inaccessible page. Shared memory has exactly the launch's size,
and only the alignment that a GPU guarantees.

The emulator is slow and misses races that depend on timing. Results, memory accesses and
synchronisation are those of a GPU.
"""

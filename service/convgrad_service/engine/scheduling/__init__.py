"""The queue of jobs, the split of large ones, the cost model, and quotas of API keys."""

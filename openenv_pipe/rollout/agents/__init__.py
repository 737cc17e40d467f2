"""Programs in the place of the pipeline's loop: their model calls, their steps, their processes."""

"""Records a training loop from inside its own process: a few steps of a script that knows nothing about stepscope."""

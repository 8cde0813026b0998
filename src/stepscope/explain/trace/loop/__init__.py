"""The training loop around the model: its time by part, its waits for the GPU, and the lines of code behind both."""

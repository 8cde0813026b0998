"""Whether a run is slower than its baseline, by more than the noise between runs."""

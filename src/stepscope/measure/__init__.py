"""Running a workload and writing down what happened. This half needs torch."""

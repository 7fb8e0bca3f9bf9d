"""What starts the ranks: torchrun's elastic agent, mpirun, and batch scripts or manifests for Slurm and Kubernetes."""

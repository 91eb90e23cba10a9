"""refold inside other libraries' models, on the instance that is given and nowhere else."""

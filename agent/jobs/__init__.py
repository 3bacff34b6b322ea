"""The jobs of this machine: their ranks, from launch to end."""

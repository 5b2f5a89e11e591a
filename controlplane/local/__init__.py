"""The deployment on one machine: embedded services, supervisor, doctor, check."""

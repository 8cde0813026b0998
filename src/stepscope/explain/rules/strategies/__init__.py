"""Rules about runs on several ranks: exposed communication, by strategy, and late ranks."""

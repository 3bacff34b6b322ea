"""Pure decisions about the version of a job's code: which version runs, and which version is rolled back."""

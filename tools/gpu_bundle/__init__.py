"""Pack what a GPU machine without network lacks, to test this project there: ``make gpu-bundle``."""

"""The one exception for input that a person can correct."""


class UserError(ValueError):
    """Input that cannot be used, told in one sentence that names the field, its value and the limit.

    The command line prints the sentence alone and exits with status 2; the server answers with status 400.
    Everything else that is raised is a defect of the program and keeps its traceback.
    """

"""What people look at: samples of a step, the HTML page of one or several runs, results of evaluations."""

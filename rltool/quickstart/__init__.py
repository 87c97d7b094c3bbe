"""The main job on one machine, composed of the verbs as child processes."""

"""From two models and text to a run: the settings of a first run, each with its reason. Without torch.

In reading order:

    first_request.py    what the user has: models, text, machine; the sizes of a student that is to be cut
    survey.py           how much text there is, and how long its documents are
    settings.py         the settings that have been chosen, each with its reason
    choose.py           length, batch, steps and learning rate, from the survey and the models
    choose_layout.py    where the teacher lives and how both models are split, from the plan
    recipe_yaml.py      the settings as a commented YAML file
    folder_in_use.py    what the folder of the run already holds
    first_run.py        all of it: from a request to the file and its summary
    distill_stages.py   the stages of `mkd distill`, each a command, and which of them are done
"""

"""Do requests end whose workers are killed, frozen or reloaded?"""

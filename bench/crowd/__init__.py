"""What becomes of requests whose workers are killed, frozen or reloaded?"""

"""Where does a request go?"""
